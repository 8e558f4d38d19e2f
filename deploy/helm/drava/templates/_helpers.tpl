{{- define "drava.labels" -}}
app.kubernetes.io/name: drava
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels of the pods of one component: (dict "root" $ "component" "driver"). */}}
{{- define "drava.selector" -}}
app.kubernetes.io/name: drava
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Image reference: (dict "root" $ "repository" "drava-controller"). */}}
{{- define "drava.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
